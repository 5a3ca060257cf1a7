"""The errors by which a decoder of JSON refuses bytes that others sent.

One of msgspec's is its own. Text that is no UTF-8, and nesting that is too deep, are errors of Python's. So a
reader of anybody's bytes names all of them, by this name.
"""

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
