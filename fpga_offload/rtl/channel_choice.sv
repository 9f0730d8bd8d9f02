// SparQ's first step for one job: the channels with the largest sums of |q| over the query heads, and the
// queries of those, scaled: q * scale * sqrt(|q|_1 / |q of the chosen|_1). Channels may be chosen in groups of
// neighbours.
//
// Sums over the heads go in their order, norms in the order of the channels, one number after another: the
// same numbers as the product's own kernels have. Heads take turns in the adders.
`default_nettype none
module channel_choice #(parameter D = 128, parameter G = 1) (
    input  wire            clk,
    input  wire            rst,
    input  wire            start,
    input  wire            bf16,
    input  wire [31:0]     scale,
    input  wire [8:0]      keep,               // 1 to D channels, whole groups
    input  wire [3:0]      together,           // log2 of a group's channels
    input  wire            q_valid,            // beats behind start, all heads one after another
    input  wire [511:0]    q_data,
    output reg             done,               // pulse
    output reg  [D-1:0]    chosen_mask,
    output wire [32*G-1:0] factors,            // of the queries, by head
    // of a chosen channel, by its place in their order, one cycle later: its number, and its queries
    input  wire [7:0]      channel_place,
    output reg  [7:0]      channel,
    input  wire [7:0]      place,
    output wire [32*G-1:0] reduced
);
    localparam NB = D / 32;
    localparam LD = $clog2(D);
    localparam ALL = G * D;
    localparam TURN = 9;                       // cycles until a sum is there again, and at least G
    localparam [31:0] ONE = 32'h3f800000;
    localparam [2:0] IDLE = 0, QUERY = 1, SUM = 2, KEYS = 3, SELECT = 4, EXPAND = 5, NORM = 6, PRODUCT = 7;
    reg [2:0] state;

    // Queries wait as beats, and are spread one number a cycle: head, neighbour, group.
    reg [511:0] beats [0:G*NB-1];
    reg [11:0] beats_in, at;
    reg [3:0] at_head;
    reg [LD-1:0] at_neighbour;
    reg [LD:0] at_group;
    wire [LD:0] groups = D >> together;
    wire [LD-1:0] at_channel = (at_group[LD-1:0] << together) | at_neighbour;
    wire [511:0] beat = beats[at_head * NB + at_channel[LD-1:5]];
    wire [18:0] wide;
    stored_to_wide convert(.bf16(bf16), .x(beat[16*at_channel[4:0] +: 16]), .y(wide));
    wire [31:0] spread = {wide, 13'd0};
    reg [31:0] queries [0:ALL-1];
    reg [31:0] query;

    // Sums of |q| by group. One is taken up again when it is there.
    reg [31:0] sums [0:D-1];
    reg sum_valid;
    reg [31:0] sum_a, sum_b;
    wire sum_done;
    wire [31:0] sum_y;
    reg [11:0] summed;
    reg [LD:0] summed_group;
    wire spread_now = state == SUM && at < ALL && at - summed < {{(11-LD){1'b0}}, groups};
    add_single adder(.clk(clk), .rst(rst), .in_valid(sum_valid), .a(sum_a), .b(sum_b), .out_valid(sum_done),
        .y(sum_y));

    reg select_start, load_end, key_valid;
    reg [31:0] key;
    wire select_ready, take_valid, take, select_done;
    reg [D-1:0] takes;                         // by group
    reg [LD-1:0] take_group;
    reg [LD-1:0] chosen [0:D-1];
    reg [8:0] taken;
    wire [8:0] keep_groups = keep >> together;
    argtopk #(.LN(LD), .DIGIT(4)) select(.clk(clk), .rst(rst), .start(select_start), .ready(select_ready),
        .key_valid(key_valid), .key(key), .load_end(load_end), .keep(keep_groups[LD:0]), .emit(1'b1),
        .out_valid(take_valid), .out_take(take), .done(select_done));

    // Norms: of all channels, and of the chosen, a channel of all heads in a turn.
    reg [8:0] step;
    reg [3:0] slot, norm_head, norm_back;
    reg norm_read, norm_valid, norm_chosen;
    reg [31:0] whole [0:G-1];
    reg [31:0] part [0:G-1];
    reg [31:0] whole_a, whole_b, part_a, part_b;
    wire whole_done, part_done;
    wire [31:0] whole_y, part_y;
    add_single whole_adder(.clk(clk), .rst(rst), .in_valid(norm_valid), .a(whole_a), .b(whole_b),
        .out_valid(whole_done), .y(whole_y));
    add_single part_adder(.clk(clk), .rst(rst), .in_valid(norm_valid), .a(part_a), .b(part_b),
        .out_valid(part_done), .y(part_y));

    // Factors, then the queries of the chosen channels, through one multiplier.
    reg divide_valid, multiply_valid, product_read;
    reg [3:0] divide_head, factor_head, read_head, product_head, back_head;
    reg [31:0] divide_a, divide_b, mul_a, mul_b;
    reg [8:0] read_step, back_step;
    reg of_products, products_read;
    wire quotient_valid, root_valid, product_valid, divide_error, root_error;
    wire [31:0] quotient, root, product;
    zkf_divsqrt #(.WEXP(8), .WMAN(24), .MODE(0), .STAGE_INPUT(1), .STAGE_OUTPUT(1)) divider(.clk(clk), .rst(rst),
        .in_valid(divide_valid), .op_sqrt(1'b0), .a(divide_a), .b(divide_b), .out_valid(quotient_valid), .y(quotient),
        .error(divide_error));
    zkf_divsqrt #(.WEXP(8), .WMAN(24), .MODE(1), .STAGE_INPUT(1), .STAGE_OUTPUT(1)) rooter(.clk(clk), .rst(rst),
        .in_valid(quotient_valid), .op_sqrt(1'b1), .a(quotient), .b(32'd0), .out_valid(root_valid), .y(root),
        .error(root_error));
    zkf_mul #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_PACK(1), .STAGE_OUTPUT(1)) multiplier(.clk(clk),
        .rst(rst), .in_valid(multiply_valid), .a(mul_a), .b(mul_b), .out_valid(product_valid), .y(product));
    reg [31:0] factor [0:G-1];
    genvar g;
    generate for (g = 0; g < G; g = g + 1) begin : heads
        reg [31:0] values [0:D-1];
        reg [31:0] value;
        always @(posedge clk) begin
            if (of_products && product_valid && back_head == g) values[back_step[LD-1:0]] <= product;
            value <= values[place[LD-1:0]];
        end
        assign reduced[32*g +: 32] = value;
        assign factors[32*g +: 32] = factor[g];
    end endgenerate

    wire norm_slot = state == NORM && step < D && slot < G;
    wire [LD-1:0] read_channel = state == NORM ? step[LD-1:0] : chosen[read_step[LD-1:0]];
    wire [3:0] query_head = state == NORM ? slot : read_head;
    always @(posedge clk) begin
        if (q_valid) beats[beats_in] <= q_data;
        if (spread_now) queries[at_head * D + at_channel] <= spread;
        query <= queries[query_head * D + read_channel];
        channel <= {{(8-LD){1'b0}}, chosen[channel_place[LD-1:0]]};
    end

    integer h;
    always @(posedge clk) begin
        done <= 0;
        select_start <= 0;
        load_end <= 0;
        key_valid <= 0;
        sum_valid <= 0;
        divide_valid <= 0;
        multiply_valid <= 0;
        norm_read <= norm_slot;
        norm_head <= slot;
        norm_chosen <= chosen_mask[step[LD-1:0]];
        norm_valid <= norm_read;
        product_read <= 0;
        if (norm_read) begin
            whole_a <= whole[norm_head];
            whole_b <= {1'b0, query[30:0]};
            part_a <= part[norm_head];
            part_b <= norm_chosen ? {1'b0, query[30:0]} : 32'd0;
        end
        if (rst) state <= IDLE;
        else case (state)
            IDLE: begin
                beats_in <= 0;
                at <= 0;
                at_head <= 0;
                at_neighbour <= 0;
                at_group <= 0;
                summed <= 0;
                summed_group <= 0;
                taken <= 0;
                take_group <= 0;
                of_products <= 0;
                products_read <= 0;
                if (start) state <= QUERY;
            end
            QUERY: begin
                if (q_valid) beats_in <= beats_in + 12'd1;
                if (beats_in == G * NB) begin
                    state <= SUM;
                    select_start <= 1;
                end
            end
            SUM: begin
                if (spread_now) begin
                    at <= at + 12'd1;
                    sum_valid <= 1;
                    sum_a <= {1'b0, spread[30:0]};
                    sum_b <= at_head == 0 && at_neighbour == 0 ? 32'd0 : sums[at_group[LD-1:0]];
                    at_group <= at_group + 1'b1 == groups ? 0 : at_group + 1'b1;
                    if (at_group + 1'b1 == groups) begin
                        at_neighbour <= at_neighbour + 1'b1;
                        if ({1'b0, at_neighbour} + 1'b1 == 1 << together) begin
                            at_neighbour <= 0;
                            at_head <= at_head + 4'd1;
                        end
                    end
                end
                if (sum_done) begin
                    sums[summed_group[LD-1:0]] <= sum_y;
                    summed <= summed + 12'd1;
                    summed_group <= summed_group + 1'b1 == groups ? 0 : summed_group + 1'b1;
                    if (summed == ALL - 1) begin
                        state <= KEYS;
                        at_group <= 0;
                    end
                end
            end
            KEYS: if (select_ready) begin
                at_group <= at_group + 1'b1;
                key_valid <= at_group < groups;
                key <= {1'b1, sums[at_group[LD-1:0]][30:0]};
                if (at_group == groups) begin
                    load_end <= 1;
                    state <= SELECT;
                end
            end
            SELECT: begin
                if (take_valid) begin
                    take_group <= take_group + 1'b1;
                    takes[take_group] <= take;
                end
                step <= 0;
                if (select_done) state <= EXPAND;
            end
            EXPAND: begin
                chosen_mask[step[LD-1:0]] <= takes[step[LD-1:0] >> together];
                if (takes[step[LD-1:0] >> together]) begin
                    chosen[taken[LD-1:0]] <= step[LD-1:0];
                    taken <= taken + 9'd1;
                end
                step <= step + 9'd1;
                slot <= 0;
                norm_back <= 0;
                for (h = 0; h < G; h = h + 1) begin
                    whole[h] <= 0;
                    part[h] <= 0;
                end
                if (step == D - 1) begin
                    state <= NORM;
                    step <= 0;
                end
            end
            NORM: begin
                slot <= slot == TURN - 1 ? 4'd0 : slot + 4'd1;
                if (slot == TURN - 1) step <= step + 9'd1;
                if (whole_done) begin
                    whole[norm_back] <= whole_y;
                    part[norm_back] <= part_y;
                    norm_back <= norm_back == G - 1 ? 4'd0 : norm_back + 4'd1;
                end
                divide_head <= 0;
                factor_head <= 0;
                read_head <= 0;
                read_step <= 0;
                back_head <= 0;
                back_step <= 0;
                if (step == D + 1) state <= PRODUCT;   // a turn later the last sums are there
            end
            PRODUCT: begin
                if (divide_head < G) begin
                    divide_head <= divide_head + 4'd1;
                    divide_valid <= 1;
                    // All channels, or only zeros: nothing to correct for.
                    divide_a <= keep == D || part[divide_head][30:23] == 0 ? ONE : whole[divide_head];
                    divide_b <= keep == D || part[divide_head][30:23] == 0 ? ONE : part[divide_head];
                end
                if (root_valid) begin
                    multiply_valid <= 1;
                    mul_a <= scale;
                    mul_b <= root;
                end
                if (!of_products && product_valid) begin
                    factor[factor_head] <= product;
                    factor_head <= factor_head + 4'd1;
                    of_products <= factor_head == G - 1;
                end
                if (of_products && !products_read) begin
                    product_read <= 1;
                    product_head <= read_head;
                    read_step <= read_step + 9'd1;
                    if (read_step + 9'd1 == keep) begin
                        read_step <= 0;
                        read_head <= read_head + 4'd1;
                        products_read <= read_head == G - 1;
                    end
                end
                if (product_read) begin
                    multiply_valid <= 1;
                    mul_a <= query;
                    mul_b <= factor[product_head];
                end
                if (of_products && product_valid) begin
                    back_step <= back_step + 9'd1;
                    if (back_step + 9'd1 == keep) begin
                        back_step <= 0;
                        back_head <= back_head + 4'd1;
                        if (back_head == G - 1) begin
                            state <= IDLE;
                            done <= 1;
                        end
                    end
                end
            end
            default: state <= IDLE;
        endcase
    end
endmodule
`default_nettype wire
