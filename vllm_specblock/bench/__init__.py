"""What drafting is worth: `specblock bench` (Table 1 of the SpecBlock paper) and its figures."""
