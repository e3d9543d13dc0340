"""Programs around training: the benchmark, the demo, doctor, options, templates, bundles and log output."""
