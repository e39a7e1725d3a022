"""A model → files that run without odevit: ONNX graphs, a torch.export program, a folder for the hub."""
