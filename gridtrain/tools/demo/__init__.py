"""`gridtrain demo`: a byte GPT trained by four workers behind a home line's cap, dense and gTop-k.

Decides nothing: the parts are (only model and train import torch)

    recipe       sizes, learning rates, densities: the tuned settings
    text         the standard library's own source as training and held-out bytes
    model        the byte GPT and its windows of text
    train        the script that every worker runs, an ordinary user of the SDK
    metrics      the file that the first worker writes and the demo follows
    orchestrate  coordinator and workers as processes: started, followed, always cleaned up
    live         progress on a terminal or in a log
    report       the table and the sentences;  picture: the SVG
    main         all of it in order
"""
