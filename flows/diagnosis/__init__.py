"""What ails a run, from what its stages wrote down."""
