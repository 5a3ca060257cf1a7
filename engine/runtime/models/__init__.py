"""Models as data: config.json, the features and the parameters that follow from it, quantization."""
