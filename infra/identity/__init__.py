"""What makes a stage the stage it is."""
