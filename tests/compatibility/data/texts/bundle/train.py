print("a script")
