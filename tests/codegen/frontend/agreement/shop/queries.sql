-- name: GetOrder :one
-- One order.
select * from shop.orders where id = @id;

-- name: OrderAndLine :many
-- fairq: nullable what
select o.*, l.what from shop.orders o left join shop.lines l on l.order_id = o.id where o.state = @state;

-- name: Paid :many
select id, customer, note from shop.paid;

-- name: Take :many
select id, customer, state, total, note, tags, payload, placed_at from shop.take(p_limit => @batch);

-- name: Place :one
-- fairq: not null id
-- fairq: always
select shop.place(
  p_customer => @customer::text,
  p_payloads => @payloads::jsonb[],
  p_note => sqlc.narg(note)::text
)::bigint as id;

-- name: Totals :many
-- fairq: not null customer, total
select t.customer::text as customer, t.total::numeric as total from shop.totals() as t (customer, total);

-- name: Rename :execrows
update shop.orders set customer = @customer, note = @note where id = any(@ids::bigint[]);

-- name: AddLine :exec
insert into shop.lines (order_id, line_no, what) values ($1, $2, $3);

-- name: CopyOrders :copyfrom
insert into shop.orders (customer, total, note, payload) values (@customer, @total, @note, @payload);

-- name: CountOrders :one
-- fairq: always
select count(*) from shop.orders;

-- name: Remove :execresult
delete from shop.orders where placed_at < @before;
