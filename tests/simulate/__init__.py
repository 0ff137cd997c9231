"""A simulated world for the parts of the product that take a `Clock`."""
