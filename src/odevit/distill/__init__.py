"""From a teacher to a student."""
