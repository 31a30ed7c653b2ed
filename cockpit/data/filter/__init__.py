"""The filter language: ``pp=2 & own_ms > 1.2 * median`` selects ranks.

`parse` converts a string to a `Filter`; `matching` evaluates it on the cockpit's data about a run. A rank without a
value matches neither a comparison nor the comparison's negation: missing is never zero.
"""

from cockpit.data.filter.matching import Matches as Matches
from cockpit.data.filter.matching import count_text as count_text
from cockpit.data.filter.matching import matches as matches
from cockpit.data.filter.matching import matching as matching
from cockpit.data.filter.names import vocabulary as vocabulary
from cockpit.data.filter.parser import FilterError as FilterError
from cockpit.data.filter.parser import completions as completions
from cockpit.data.filter.parser import parse as parse
from cockpit.data.filter.syntax import Filter as Filter
from cockpit.data.filter.syntax import Vocabulary as Vocabulary
