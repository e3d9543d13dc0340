"""`gridtrain demo`: four workers train a byte GPT over capped connections, with dense and gTop-k exchanges.

recipe            sizes, learning rates, densities: the tuned settings
text_corpus       the standard library's source as training and held-out bytes
demo_model        the model and its windows of text (imports torch)
small_llama       a Llama with its tokenizer as a folder, for examples (imports transformers)
demo_worker       the script of every worker, an ordinary training loop (imports torch)
step_records      the files that the workers write and the demo reads
orchestrator      starts coordinator and workers as processes, and always terminates them
progress_view     progress on a terminal or in a log
demo_report       the table and the sentences;  svg_chart: the chart
main              runs the demo from start to end
pipeline_demo, pipeline_worker, pipeline_model    the same for a model in stages
"""
