#!/bin/sh
# One database and one role for each user of this server; a role reaches its own database only.
# Postgres's image runs this on an empty volume, as the superuser, before it listens on the network.
set -eu

# make_database NAME PASSWORD. The password travels in a variable, never on a command line.
make_database() {
    NAME="$1" PASSWORD="$2" psql --no-psqlrc --quiet --set=ON_ERROR_STOP=1 \
        --username="$POSTGRES_USER" --dbname="$POSTGRES_DB" <<'SQL'
\getenv name NAME
\getenv password PASSWORD
SELECT format('CREATE ROLE %I LOGIN', :'name')
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'name') \gexec
ALTER ROLE :"name" WITH LOGIN PASSWORD :'password';
SELECT format('CREATE DATABASE %I OWNER %I', :'name', :'name')
WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'name') \gexec
REVOKE ALL ON DATABASE :"name" FROM PUBLIC;
SQL
}

make_database mlflow "$MLFLOW_PASSWORD"
make_database flyte "$FLYTE_PASSWORD"
