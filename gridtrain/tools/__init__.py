"""Programs around training: the benchmark, the demo, doctor, options, templates and bundles."""
