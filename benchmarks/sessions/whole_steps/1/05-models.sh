true # the other card's job makes them
