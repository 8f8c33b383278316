"""Public names of `astuner_helpers` and the modules that define them. `astuner_helpers` also reads this file."""

from astuner_helpers.helper import Helper as Helper
from astuner_helpers.models import HelperMeter as HelperMeter
from astuner_helpers.models import HelperModels as HelperModels
from astuner_helpers.reply import BudgetSpent as BudgetSpent
from astuner_helpers.reply import HelperAnswer as HelperAnswer
from astuner_helpers.reply import HelperFailed as HelperFailed
from astuner_helpers.reply import Usage as Usage
