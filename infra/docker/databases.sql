-- Databases of the servers in compose.yaml; run once, at the first start of Postgres.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
