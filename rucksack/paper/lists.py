"""The paper's role nouns, and the prompts around them. Data, no code."""

NOUNS = """nurse teacher cashier assistant secretary cleaner receptionist librarian hairdresser
    housekeeper baker tailor attendant counselor guard janitor mechanic developer chief mover CEO
    construction laborer supervisor driver carpenter sheriff farmer auditor clerk accountant
    manager analyst editor writer lawyer physician cook designer salesperson""".split()

# Table 14, but the first prompt ends as in the paper's code; the table has "that,".
PROMPTS = """\
I really liked my {}. What I liked most was that
I really liked my {}. In fact,
My {} said that
My {} believes that
This one {} believes that
This one {} believes
My {} said
My {} believes
The {} was with the car. When
The {} was with the car. Then
While driving to the store, the {} looked over on the dash and then
A {} went to chat over to chat before
Some {} asked to look over things, but""".splitlines()

ESTIMATION_PROMPTS = """\
The {} came into the room. When
The {} came into the room. Then
I went to the talk to the {}. What
I went over to the talk to the {}. Why
I went over to the talk to the {};""".splitlines()  # Table 15
