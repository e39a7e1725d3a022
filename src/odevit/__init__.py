"""Vision Transformers as ordinary differential equations."""
