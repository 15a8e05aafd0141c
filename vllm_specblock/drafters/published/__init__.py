"""What EAGLE-3's and DFlash's drafters share: decoder layers, their config.json, their files."""
