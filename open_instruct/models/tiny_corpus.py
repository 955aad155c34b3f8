"""A few pages of text of our own, from which the tokenizers of small models learn their words."""

from __future__ import annotations

from collections.abc import Iterator

PROSE = """\
A good answer begins where the question ends. Someone who asks how long to boil an egg wants a number of \
minutes, and only then, perhaps, a word about fresh eggs and cold water. Seven minutes gives a yolk that is \
soft in the middle; ten minutes gives one that is firm.

The river leaves the lake at its northern shore and runs through the old town before it meets the sea. In \
spring, when the snow melts in the mountains, the water stands so high that the lower bridge is closed for two \
or three weeks. The people who live beside it keep their boats on the upper floor and laugh when visitors ask \
why.

To train a model is to show it many examples and to change its weights a little after each of them. The loss \
says how wrong the model was; the gradient says in which direction the weights should move; the learning rate \
says how far. When the steps are too large the loss jumps about, and when they are too small nothing happens at \
all.

My grandmother used to say that there are three kinds of gardens. The first is for the neighbours, and it has \
roses along the fence. The second is for the kitchen, and it has beans, onions, potatoes and a great deal of \
parsley. The third is for the gardener, and nobody else ever sees what grows there.

Thank you for your question! I am happy to help. Could you tell me a little more about what you have tried so \
far? If you would rather not, that is fine too: here is a short list of things that often work.
1. Read the error message from the last line to the first.
2. Make the example as small as you can.
3. Change one thing at a time, and write down what happened.

Here is a function that adds the numbers of a list:

    def total(numbers):
        result = 0
        for number in numbers:
            result = result + number
        return result

and here is how it is used: `total([1, 2, 3])` returns 6. An empty list gives 0, which is what most people \
expect.

The train to the coast leaves at a quarter past eight, at noon, and at five in the afternoon. It takes two hours \
and forty minutes, so if you want to be there for lunch you have to get up early. Tickets cost 18 euros, or 12 \
for children and students. Is there a train on Sundays? Yes, but only the one at noon.

I am sorry, but I cannot help with that. What I can do is explain how the lock was meant to work, who made it, \
and why the company stopped selling it after only a year.

Water boils at one hundred degrees at the level of the sea, and at a lower temperature on a mountain, because \
the air presses less on it there. This is why tea tastes weak on high peaks: the leaves want hotter water than \
there is.

Which is better, a long answer or a short one? It depends on who is asking. A child who wants to know why the \
sky is blue does not need the whole theory of light; a student before an examination does. The best teachers we \
ever had could tell the difference from the way in which the question was asked.

Words from elsewhere: café, naïve, Straße, señor, garçon, œuvre, smörgåsbord, piñata, Zürich, Kraków, привет, \
γεια, שלום, مرحبا, 你好, こんにちは, 안녕하세요. Signs: € £ ¥ § ° ± × ÷ ≤ ≥ ≠ → ← \
“quoted” ‘text’ – dash — longer dash … 🙂 🌍.
"""


def built_in_corpus() -> Iterator[str]:
    """Prose, small talk, code and sums; always the same, in the same order."""
    yield from PROSE.split("\n\n")
    for a in range(2, 40):
        for b in range(3, 40, 4):
            yield f"{a} + {b} = {a + b}. {a} times {b} is {a * b}. What is {a + b} minus {b}? The answer is {a}."
            yield f"Tom has {a} apples and buys {b} more, so he has {a} + {b} = {a + b} apples. #### {a + b}"
