"""What a trained model can do, measured: one module for each evaluation."""
