def main(**k): return 0
