"""Programs around training: benchmark, demo, doctor, options, templates, bundles."""
