"""What `tools/bench_codec.py` is made of: data sets, metrics, an independent model of our codecs, the others, tables and plots."""
