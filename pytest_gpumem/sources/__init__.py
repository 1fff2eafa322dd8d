"""Where memory traces come from: a source runs the training steps and writes down what its allocator did."""
