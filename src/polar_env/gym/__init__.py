"""The gym room: the only door to NeMo Gym."""
