"""Tables: CSV, Parquet, Arrow and frames, whose columns become features."""
