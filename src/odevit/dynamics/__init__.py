"""What a flow does: bounds, Jacobians, exponents, certificates and cost. Knows the model only."""
