"""Everything kvkeep raises on purpose. Each message names the value at fault and the way out.

KvkeepError
├── UnknownName         a method, modifier, task or model name that is not registered
├── BadParameter        a parameter with an impossible value, or one the method does not have
│   └── BudgetTooSmall  the budget cannot hold what the method always keeps
├── BadTensor           wrong shape, dtype or device, or not a number
├── BadInput            a document or question that cannot be read or does not fit
│   └── NoData          tasks of which not one sample is available
├── UnsupportedModel    attention that cannot be observed exactly
├── CacheMisuse         a cache used in a way its contents do not allow
├── BadCacheFile        a saved cache that is damaged or belongs to another model
├── ModelUnavailable    a model that could not be fetched or loaded
├── MissingExtra        an optional package that is not installed
├── StoreFull           no room left for offloaded tokens
└── QueueFull           too many requests wait already

UserWarning
├── QueryAwareWarning   a question about a text that was compressed before the question was known
└── SlowAnswerWarning   an exact answer that took about as many passes over its history as it has tokens
"""


class KvkeepError(Exception):
    """Base of every error raised on purpose."""


class UnknownName(KvkeepError, LookupError):
    pass


class BadParameter(KvkeepError, ValueError):
    pass


class BudgetTooSmall(BadParameter):
    pass


class BadTensor(KvkeepError, ValueError):
    pass


class BadInput(KvkeepError, ValueError):
    pass


class NoData(BadInput):
    pass


class UnsupportedModel(KvkeepError, TypeError):
    pass


class CacheMisuse(KvkeepError, RuntimeError):
    pass


class BadCacheFile(KvkeepError, ValueError):
    pass


class ModelUnavailable(KvkeepError, OSError):
    pass


class MissingExtra(KvkeepError, ImportError):
    pass


class StoreFull(KvkeepError, MemoryError):
    pass


class QueueFull(KvkeepError, RuntimeError):
    pass


class QueryAwareWarning(UserWarning):
    pass


class SlowAnswerWarning(UserWarning):
    pass
