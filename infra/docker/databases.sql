-- Of the servers of compose.yaml, run once, by the first start of Postgres.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
