create type size as enum ('small', 'large');
comment on type size is 'How big a parcel is';
create table parcels (
  id int primary key,
  size size not null,
  note text
);
comment on table parcels is 'What waits for a courier';
comment on column parcels.size is 'As measured on arrival';
