-- name: GetInvoiceLines :many
select * from billing.invoice_lines;

-- name: listHTTPCodes :many
select street_name as "HTTPCode", id from customer_addresses;

-- name: count_all :one
select count(*) from customer_addresses;

-- name: SetByID2 :exec
update customer_addresses set street_name = $1;
