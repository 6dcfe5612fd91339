"""Sixty short prompts of the kinds that people ask."""

LETTER = "Dear Sir, we recieved you're order on Monday and will sent it tomorow. Best regards, Anna"
CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""
NOTE = "Invoice 4711 of 3 May 2025: Ada Byron, 12 Engine Street, London, owes 310.50 EUR, due on 1 June."
STORY = "The river rose overnight. By morning the bridge was closed, the school stayed shut, and boats carried bread."

CHAT = [
    "What is the capital of France?", "Name three fruits.", "Why is the sky blue?", "Tell me a joke about cats.",
    "How do I boil an egg?", "What rhymes with 'light'?", "Who wrote Hamlet?", "Is a tomato a fruit? Explain.",
    "Give me a name for a small brown dog.", "What should I pack for a day at the beach?",
]  # fmt: skip
EDITS = [
    f"{ask}\n\n{LETTER}"
    for ask in (
        "Correct the spelling.", "Make it more polite.", "Shorten this letter.", "Rewrite it in the past tense.",
        "Replace Monday by Friday and repeat the letter.", "Repeat this letter word for word.", "Sign it as Peter.",
        "Write it as a list.", "Add a subject line.", "Make it sound angry.",
    )
]  # fmt: skip
CODING = [
    f"{ask}\n\n```python\n{CODE}```"
    for ask in (
        "Add type hints.", "Add a docstring.", "Rename values to numbers.", "Write a test for this.", "Explain this.",
        "Handle an empty list.", "Write the median in the same style.", "Use sum().", "Translate to JavaScript.",
        "Repeat this function.",
    )
]  # fmt: skip
EXTRACTION = [
    f"{ask}\n\n{NOTE}"
    for ask in (
        "Extract all fields as JSON.", "Who owes money?", "Which date is it due?", "Give the address alone.",
        "Write it as a Markdown table.", "Write it as YAML.", "List all numbers.", "Write it as one CSV line.",
        "Which currency is it?", "Write it as XML.",
    )
]  # fmt: skip
SUMMARIES = [
    f"{ask}\n\n{STORY}"
    for ask in (
        "Summarise in one sentence.", "Give it a title.", "List what happened.", "What was closed?", "Retell it.",
        "Tell it to a child.", "Write the next sentence.", "Summarise in five words.", "Make it a headline.",
        "Repeat the first sentence.",
    )
]  # fmt: skip
LANGUAGES = [
    "Wie heißt die Hauptstadt von Italien?", "Écris une phrase sur la mer.", "¿Qué es una manzana?",
    "Qual è il fiume più lungo d'Italia?", "Översätt 'god morgon' till engelska.", "日本の首都はどこですか。",
    "Как тебя зовут?", "中国的首都是哪里？", "Co to jest kot?", "Translate to German: The house is small. 🙂",
]  # fmt: skip
PROMPTS = CHAT + EDITS + CODING + EXTRACTION + SUMMARIES + LANGUAGES
