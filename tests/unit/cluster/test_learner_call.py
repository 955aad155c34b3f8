"""What is said of a learner that was lost."""

import subprocess
import sys

# Ray settles while it is imported with which token it talks, so not in the process of other tests.
EXPLAIN = """
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError
from open_instruct.cluster.learner_call import explain_loss

context = ActorDiedErrorContext(
    class_name="Learner", actor_id=bytes(16), error_message="The owner is gone.", never_started=True
)
print(explain_loss(ActorDiedError(context)))
context.error_message = "The actor is dead because all references to the actor were removed."
print(explain_loss(ActorDiedError(context)))
context.never_started = False
context.error_message = "The actor is dead because its node has died. Node Id: 1"
print(explain_loss(ActorDiedError(context)))
"""


def test_loss_is_explained_by_its_reason_when_the_actor_never_ran() -> None:
    said = subprocess.run([sys.executable, "-c", EXPLAIN], capture_output=True, text=True)
    first, of_token, last = said.stdout.splitlines()
    assert (first, last) == ("The owner is gone.", "its node is gone")
    assert "RAY_AUTH_MODE=disabled" in of_token
