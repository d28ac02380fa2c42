"""Cases that run behind the marker `slow`: `make test` has a sibling of each that is enough by day.

What is slow in itself carries the marker where it is written. Here stand cases of tests whose other
cases are quick, or say the same of another router, dtype or size.
"""

SLOW_CASES = {
    'tests/launch/bench_test.py': ['test_attention_writes_json_and_a_picture'],
}
