"""Policy folders as torch modules: the one loader that node, verifier and trainer share. How each runs a model is its own."""
