"""A server looks for cycles rarely, and never at what was there when it became ready."""

import subprocess
import sys

SCRIPT = """
import gc
from serving.garbage import collect_rarely
kept = [[] for _ in range(1000)]
collect_rarely()
assert gc.get_freeze_count() > 1000
before = gc.get_stats()[0]["collections"]
tuples = [(i, str(i)) for i in range(50_000)]
assert gc.get_stats()[0]["collections"] == before
class Node: pass
node = Node(); node.me = node
assert gc.isenabled() and (node := None) is None and gc.collect() > 0
"""


def test_short_lived_objects_cause_no_collection_and_cycles_still_go():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
