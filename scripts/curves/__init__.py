"""`make curves`: one real run of every named recipe, on two engines and at two budgets; its reward curve goes to docs/recipes.md."""
