"""The one client of addresses that are not ours: judges and teachers.

Whatever such an address sends, an answer is bounded in unpacked bytes, and in seconds from the first byte sent to the
last received.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from ycore.foreign import foreign_line

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 20.0
_PACKINGS = ("identity", "gzip", "deflate")
"""One of them is a thousand times smaller than what it unpacks to; several, one in another, have no such bound."""


class AddressFailed(Exception):
    """No answer that can be used; the message says why in one line. `may_pass`: another try may have one."""

    def __init__(self, problem: str, *, may_pass: bool = False) -> None:
        super().__init__(foreign_line(problem))
        self.may_pass = may_pass


class AddressAnswer(NamedTuple):
    status: int
    data: bytes
    retry_after_s: float = 0.0

    @property
    def line(self) -> str:
        """The beginning of the answer, for a message."""
        return foreign_line(self.data[:200].decode(errors="replace"))


class Address:
    """Example: `await Address("http://judge/v1/", headers={}).ask("chat/completions", {...}, max_bytes=2**22)`."""

    def __init__(
        self,
        base_url: str = "",
        *,
        headers: Mapping[str, str],
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        from http.cookiejar import CookieJar, DefaultCookiePolicy

        import httpx  # a command that plans asks no address

        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={"Accept-Encoding": "gzip", **headers},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # the caller has the deadline
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            transport=transport,
        )

    async def ask(self, path: str, body: Mapping[str, Any], *, max_bytes: int) -> AddressAnswer:
        """Return the answer to this JSON; AddressFailed where there is none, or it has more than `max_bytes`."""
        import httpx

        may_pass = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
        try:
            async with self._client.stream("POST", path, json=body) as response:
                packing = response.headers.get("content-encoding", "identity")
                if packing.lower() not in _PACKINGS:
                    raise AddressFailed(
                        f"its answer is packed by {packing}, which was not asked for"
                    )
                data = bytearray()
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > max_bytes:
                        raise AddressFailed(f"its answer has more than {max_bytes} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as problem:
            raise AddressFailed(
                str(problem) or type(problem).__name__, may_pass=isinstance(problem, may_pass)
            ) from None
        after = response.headers.get("retry-after", "")
        return AddressAnswer(
            response.status_code, bytes(data), float(after) if after.isdecimal() else 0.0
        )

    async def close(self) -> None:
        await self._client.aclose()


def fetch_answer(
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    max_bytes: int,
) -> AddressAnswer:
    """Return the answer of a URL to this JSON; AddressFailed unless its status is 200.

    The calling code may be outside of an event loop or inside.
    """

    async def work() -> AddressAnswer:
        address = Address(headers=headers)
        try:
            async with asyncio.timeout(timeout_s):
                return await address.ask(url, body, max_bytes=max_bytes)
        except TimeoutError:
            raise AddressFailed(f"no whole answer within {timeout_s:g} s") from None
        finally:
            await address.close()

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: asyncio.run(work())).result()
    if answer.status != 200:
        raise AddressFailed(f"it answered {answer.status}: {answer.line}")
    return answer
