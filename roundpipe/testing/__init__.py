"""What checks the library against the models of other packages; nothing here is needed to train."""
