"""Training text: from chats and documents to packed windows of tokens."""
