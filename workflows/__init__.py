"""What runs, in which order. Workflows import tasks; nothing imports workflows."""
