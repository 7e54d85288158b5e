"""What runs the model: one file per engine, imported only by the top of the package and by users."""
