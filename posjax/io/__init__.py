"""Everything that posjax writes or reads: run directories, checkpoints, TensorBoard events."""
