"""What studies the product: strikes, failure simulator, quality lab, benchmarks. The product imports none of it."""
