create table shelves (
  id int primary key,
  label text,
  codes int[] not null,
  grid text[][],
  opened date[]
);
