"""Errors of the endpoint, in OpenAI's form."""

from typing import Any


class APIError(Exception):
    """A request that is refused.

    Clients of OpenAI's send a request again after 408, 409, 429 and 5xx, and give up after any
    other status.

    Example: `APIError("temperature 0.2 is not the run's", param="temperature")`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}
