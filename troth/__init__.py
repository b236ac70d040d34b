"""Composition root: the command line, settings, wiring of roles, the demo. The only package that imports all others."""
