"""Any trained ViT as a teacher: its states, attention, logits and parts."""
