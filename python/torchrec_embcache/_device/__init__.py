"""Device tier: tensors of the device, pinned host memory and streams."""
