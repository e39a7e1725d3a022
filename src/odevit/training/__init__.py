"""The one loop: train, fine-tune, distil, resume, evaluate."""
