"""`gridtrain demo`: a byte GPT trained by four workers behind a home line's upload cap.

Decides nothing: the parts are

    recipe    sizes, learning rates, densities: the tuned settings            (no torch)
    text      the standard library's own source as training and held-out bytes   (no torch)
    model     the byte GPT and its windows of text                               (torch)
    train     the script that every worker runs, an ordinary user of the SDK     (torch)
    orchestrate   coordinator + workers as processes, live progress, clean-up    (no torch)
    report    the table, the picture, the honest sentence                        (no torch)
"""
