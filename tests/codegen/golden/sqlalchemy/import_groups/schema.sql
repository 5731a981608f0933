create table visits (
  id uuid primary key,
  fee numeric not null,
  seen_at timestamptz not null,
  notes text[],
  extra jsonb
);
create type ward as enum ('north', 'south');
